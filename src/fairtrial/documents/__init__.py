"""Long documents."""
