"""Configuration, errors, paths, and the records that cross a process or a disk."""
