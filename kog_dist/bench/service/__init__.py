"""HTTP services, this one or another, as a load of requests sees them."""
