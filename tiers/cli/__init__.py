"""The command line: a file per verb, each a class that `cli.main` lists."""
