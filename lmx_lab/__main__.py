"""``python -m lmx_lab`` is the ``lmx-lab`` script."""

from lmx_lab.cli import main

if __name__ == "__main__":
    main()
