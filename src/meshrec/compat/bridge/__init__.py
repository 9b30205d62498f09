"""Building blocks of the TorchRec bridge: import hook, name table, and classes with TorchRec's arguments."""
