"""`dynatree bench report`: tables and plots of many measurements, in Markdown and as one page."""
