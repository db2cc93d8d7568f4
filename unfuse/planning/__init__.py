"""Plans a deployment: resources of a machine, layouts of workers, placement on devices."""
