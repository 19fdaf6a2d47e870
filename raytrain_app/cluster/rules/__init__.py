"""What can be wrong with a cluster file, a group of rules a file; each rule yields what it finds."""
