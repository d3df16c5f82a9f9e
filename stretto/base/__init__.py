"""Configuration, errors, paths, and records that cross a process or a disk."""
