"""Tools: their calls, where they run, and how the policy names them."""
