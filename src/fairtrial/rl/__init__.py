"""Learning from reward."""
