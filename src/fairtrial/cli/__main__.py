"""``python -m fairtrial.cli``."""

from fairtrial.cli import main

main()
