"""Pages of a browser: one HTML file each, which holds its style and its script. Standard library only.

What pages of rounds have in common lies in `shared`: parts of one style and of one script, in the order of `page.py`.
"""

from dynatree.pages.page import Page, build_page, embeddable

__all__ = ["Page", "build_page", "embeddable"]
