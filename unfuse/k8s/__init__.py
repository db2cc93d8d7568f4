"""The operator: what custom resources ask for, as ordinary objects of Kubernetes, and how these are, as conditions."""
