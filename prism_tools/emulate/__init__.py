"""Hybrid emulation: sandbox ranks run the program for real, one assistant plays every other rank (P§6)."""
