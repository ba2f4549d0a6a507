"""Web pages, each one HTML file with its style and its script; needs only the standard library.

The folder `shared` has the style sheets and scripts that all pages of rounds share; `page.py` fixes their order.
"""

from dynatree.pages.page import Page, build_page, embeddable

__all__ = ["Page", "build_page", "embeddable"]
