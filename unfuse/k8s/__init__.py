"""The Kubernetes operator: turns custom resources into Kubernetes objects and reports conditions."""
