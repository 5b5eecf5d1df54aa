"""How much memory and time a layout takes, before a device is touched."""
