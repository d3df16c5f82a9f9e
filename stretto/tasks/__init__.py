"""Problems with verdicts, one file a kind."""
