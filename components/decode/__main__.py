"""The decode worker: `python -m components.decode --plan FILE`. See README.md."""

import sys

from components.common.engine.launch import main

if __name__ == "__main__":
    sys.exit(main("decode"))
