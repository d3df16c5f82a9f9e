"""From words to pictures: what was asked for is kept in a ledger, prompts are written from it, and pictures are held against it."""
