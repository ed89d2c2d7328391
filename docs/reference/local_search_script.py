"""Hook of MkDocs: takes the script that search needs from the site, and not from the network."""

from typing import Any

REMOTE = "https://unpkg.com/iframe-worker/shim"
LOCAL = "assets/iframe-worker.js"


def on_post_page(output: str, page: Any, **kwargs: Any) -> str:
    """Returns a page with the script's path in the site."""
    return output.replace(REMOTE, "../" * page.url.count("/") + LOCAL)


def on_post_template(output_content: str, **kwargs: Any) -> str:
    """Returns a page at the top of the site, such as the page for missing pages."""
    return output_content.replace(REMOTE, LOCAL)
