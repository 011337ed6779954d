"""The command line. Installed as `segcal_cli`; one thin module per command, the work is in `segcal`."""
