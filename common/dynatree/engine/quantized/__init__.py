"""Models with quantised linear layers: rounded at load, or read from files that hold such weights."""
