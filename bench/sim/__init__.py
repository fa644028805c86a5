"""Load or recompute on a virtual clock.

world.py   the truth: engine, store and their noise (knows nothing of the cost model)
oracle.py  decisions with hindsight: sees the future and the true rates (knows nothing of the cost model)
drive.py   runs strategies in a world; the only file that knows both
grid.py    the cells: engine curves x store speeds x lengths x loads
"""
