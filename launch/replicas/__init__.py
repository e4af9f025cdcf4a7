"""`--replicas N`: several engines behind one router."""
