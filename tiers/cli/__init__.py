"""The command line: a file per verb, each a class that `tiers.cli.main` lists."""
