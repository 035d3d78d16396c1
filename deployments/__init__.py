"""Deployments of raykv: a Ray Serve app with prefill and decode workers, and the demo that runs it."""
