"""The peers' words: their names, arguments and config objects over models of this library."""
