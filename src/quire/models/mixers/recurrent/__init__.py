"""Mixers with a recurrent state: their specs, their parameters, and what runs them."""
