"""Worlds behind one protocol: embedded (in process); AlpaSim and PAI are to come."""
