"""Problems with verdicts, one file per kind of task."""
