"""Run the inference server on clusters, behind the proxies and schedulers of other projects."""
