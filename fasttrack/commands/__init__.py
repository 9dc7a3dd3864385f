"""One module per noun of the command line; each registers its commands on the Typer application it is given."""
