"""Plans as values: stages, schedules, dependencies, timelines."""
