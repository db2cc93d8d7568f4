"""What stands between strangers and the routes: connections, hosts and origins, keys, limits."""
