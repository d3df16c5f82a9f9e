"""The command line: declarations of commands and options."""
