"""The command line, one file a stage."""
