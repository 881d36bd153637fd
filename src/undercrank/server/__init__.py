"""The studio over HTTP, over the job store and the planner. It never imports torch."""
