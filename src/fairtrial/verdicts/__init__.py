"""Fairtrial's own verdicts put to trial: simulated trials whose truth is known, and ways of judging them."""
