"""Drivers that run other engines for comparison."""
