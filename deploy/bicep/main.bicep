// Two storage accounts, four identities and their rights, federated to the service accounts of one graph.
// Not run here: there is no subscription on the machine this was written on. Network: private endpoints of your own.
param location string = resourceGroup().location
param prefix string
@description('Issuer of the cluster: az aks show --query oidcIssuerProfile.issuerUrl')
param issuer string
param namespace string = 'inference'
param graph string

var reader = '2a2b9908-6ea1-4ae2-8e65-a410df84e7d1'       // Storage Blob Data Reader
var contributor = 'ba92f5b4-2d11-453d-a403-e96b0029c9fe'  // Storage Blob Data Contributor
var common = { allowSharedKeyAccess: false, allowBlobPublicAccess: false, minimumTlsVersion: 'TLS1_2', publicNetworkAccess: 'Disabled' }

resource weights 'Microsoft.Storage/storageAccounts@2023-05-01' = {
  name: '${prefix}weights'
  location: location
  kind: 'StorageV2'
  sku: { name: 'Standard_ZRS' }
  properties: common
}

resource weightsBlob 'Microsoft.Storage/storageAccounts/blobServices@2023-05-01' = {
  parent: weights
  name: 'default'
  properties: { isVersioningEnabled: true, deleteRetentionPolicy: { enabled: true, days: 30 } }
}

// No versions, no soft delete: what a purge deletes is gone.
resource kv 'Microsoft.Storage/storageAccounts@2023-05-01' = {
  name: '${prefix}kv'
  location: location
  kind: 'BlockBlobStorage'
  sku: { name: 'Premium_LRS' }
  properties: common
}

resource kvBlob 'Microsoft.Storage/storageAccounts/blobServices@2023-05-01' = {
  parent: kv
  name: 'default'
  properties: { isVersioningEnabled: false, deleteRetentionPolicy: { enabled: false } }
}

resource identities 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = [for name in ['serving', 'weights', 'publisher', 'approver']: {
  name: '${prefix}-${name}'
  location: location
}]

// Only the two that serve are federated to pods.
resource federated 'Microsoft.ManagedIdentity/userAssignedIdentities/federatedIdentityCredentials@2023-01-31' = [for (name, i) in ['serving', 'weights']: {
  parent: identities[i]
  name: '${graph}-${name}'
  properties: {
    issuer: issuer
    subject: 'system:serviceaccount:${namespace}:${graph}-${name}'
    audiences: ['api://AzureADTokenExchange']
  }
}]

resource onWeights 'Microsoft.Authorization/roleAssignments@2022-04-01' = [for (role, i) in [reader, reader, contributor, contributor]: {
  name: guid(weights.id, identities[i].id, role)
  scope: weights
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', role)
    principalId: identities[i].properties.principalId
    principalType: 'ServicePrincipal'
  }
}]

resource onKv 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(kv.id, identities[0].id, contributor)
  scope: kv
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', contributor)
    principalId: identities[0].properties.principalId
    principalType: 'ServicePrincipal'
  }
}

output clientIds object = {
  serving: identities[0].properties.clientId
  weights: identities[1].properties.clientId
  publisher: identities[2].properties.clientId
  approver: identities[3].properties.clientId
}
