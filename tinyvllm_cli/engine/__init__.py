"""The engine: which tokens are computed in which step. Knows no model and no device."""
