"""The command line: declarations of commands and options. Every command imports its stage late, so that help needs no torch."""
