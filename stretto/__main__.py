"""``python -m stretto`` is the command ``stretto``."""

from stretto.cli.main import main

main()
