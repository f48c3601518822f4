"""Pictures of timelines, measured or simulated: a PNG, a web page, or a trace for Perfetto."""
