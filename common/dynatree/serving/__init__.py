"""Building blocks of every service: servers, channels, admission, security, metrics and tracing."""
