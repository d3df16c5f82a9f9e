"""Tool calls and reasoning in the answers of models: formats, parsers and grammars."""
