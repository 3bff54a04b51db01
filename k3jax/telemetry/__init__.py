"""Telemetry of a run: where its time goes, its metrics lines and who gets them, traces of the compiled step."""
