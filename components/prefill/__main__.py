"""The prefill worker: `python -m components.prefill --plan FILE`. See README.md."""

import sys

from components.common.engine.launch import main

if __name__ == "__main__":
    sys.exit(main("prefill"))
