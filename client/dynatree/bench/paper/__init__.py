"""The tables and figures of the papers as presets, and the papers' own figures beside what is measured."""
