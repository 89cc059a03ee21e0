"""The training wing: model, loss, optimizer, ranks, and the state on disk."""
