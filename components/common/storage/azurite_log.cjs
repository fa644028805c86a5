// Loaded into Azurite by `node --require`: an access log of what really left the socket.
// One JSON line per request: {t, account, method, path, comp, range, status, length, body, ms}
//   length  Content-Length of the answer (-1: none);  body  bytes of it handed to the socket, also when the client cut the connection.
// Azurite's own access log is not used because it contains whole URLs, and with them signatures.
'use strict';
const fs = require('node:fs');
const http = require('node:http');
const https = require('node:https');

const path = process.env.DYNAMO_BLOB_ACCESS_LOG;
if (path) {
  const out = fs.openSync(path, 'a', 0o600);
  let lines = [];
  const flush = () => {
    if (lines.length) fs.writeSync(out, lines.join(''));
    lines = [];
  };
  process.on('exit', flush);
  const watch = (request, response) => {
    const t = Date.now();
    const socket = request.socket;
    const before = socket.bytesWritten;
    let done = false;
    const log = () => {
      if (done) return;
      done = true;
      const url = new URL(request.url, 'http://x');
      if (url.pathname === '/') return; // the launcher asks whether we live: no account, no blob
      const header = response._header ? Buffer.byteLength(response._header, 'latin1') : 0;
      const length = Number(response.getHeader('content-length') ?? -1);
      const body = request.method === 'HEAD' ? 0 : Math.max(0, socket.bytesWritten - before - header);
      lines.push(JSON.stringify({
        t: t / 1000, account: url.pathname.split('/')[1] || '', method: request.method, path: decodeURIComponent(url.pathname),
        comp: url.searchParams.get('comp') || '', range: request.headers['x-ms-range'] || request.headers.range || '',
        status: response.statusCode, length, body, ms: Date.now() - t,
      }) + '\n');
      if (lines.length === 1) setImmediate(flush);
    };
    response.once('finish', log);
    response.once('close', log);
  };
  for (const kind of [http.Server, https.Server]) {
    const emit = kind.prototype.emit;
    kind.prototype.emit = function (event, ...args) {
      if (event === 'request') watch(args[0], args[1]);
      return emit.call(this, event, ...args);
    };
  }
}
