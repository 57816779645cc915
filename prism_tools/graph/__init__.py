"""The PrismTrace graph: its words, its one reader and writer, and what follows from it without running anything."""
