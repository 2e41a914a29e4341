"""What the Hub on loopback answers: repositories, commits, LFS, files, trees, search, users.

The pages are those that the real `huggingface_hub` asks for, with the answers that it needs.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import yaml
from server import USERS, Base, Repo, git, sha256

LFS = (".safetensors", ".bin")
# of a search
PAGE = 2


class Pages(Base):
    """Everything else."""

    bodies = "text"
    routes: tuple[tuple[str, str, str], ...] = (
        ("GET", r"/index/(?P<model>.+)\.json", "index"),
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/repos/create", "create"),
        ("GET", r"/api/models", "search"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<rev>.+)", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)(?:/(?P<file>.*))?", "tree"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/paths-info/(?P<rev>.+)", "paths"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<rev>.+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>.+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>.+)", "commit"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)/lfs-verify", "verify"),
        ("HEAD|GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)", "resolve"),
    )

    def answer(self, path: str) -> None:
        for methods, pattern, name in self.routes:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split("|"):
                known = {key: unquote(v) for key, v in match.groupdict().items() if v is not None}
                where = {"resolve": self.command.lower()}.get(name, name)
                if not self.failed(where):
                    run: Callable[..., None] = getattr(self, f"on_{name}")
                    run(**known)
                return None
        return self.refuse(404, f"no such page: {self.command} {path}")

    def on_index(self, model: str) -> None:
        """What stands for AdapterHub's own server."""
        if model not in self.hub.indexes:
            return self.refuse(404, "Not found")
        return self.send(200, self.hub.indexes[model])

    # --- who asks ---

    def user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return USERS.get(token)

    def repo(self, repo_id: str, write: bool = False) -> Repo | None:
        """The repository, where the user may see it; else the request is refused."""
        if self.headers.get("Authorization") and self.user() is None:
            self.refuse(401, "Invalid credentials in Authorization header")
            return None
        repo = self.hub.repos.get(repo_id)
        owner = self.user() == repo_id.partition("/")[0]
        if repo is None or (repo.private and not owner):
            status = 404 if self.user() else 401
            self.refuse(status, "Repository not found", "RepoNotFound")
            return None
        if write and not owner:
            self.refuse(403 if self.user() else 401, "You have no right to write here")
            return None
        return repo

    def revision(self, repo: Repo, revision: str) -> str | None:
        sha = repo.find(revision)
        if sha is None:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    # --- repositories ---

    def on_whoami(self) -> None:
        user = self.user()
        if user is None:
            return self.refuse(401, "Invalid username or password.")
        return self.json({"type": "user", "name": user, "orgs": []})

    def on_validate(self) -> None:
        text = json.loads(self.body)["content"]
        try:
            yaml.safe_load(text.split("---")[1])
        except (IndexError, yaml.YAMLError) as error:
            return self.json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return self.json({"errors": [], "warnings": []})

    def on_create(self) -> None:
        asked = json.loads(self.body)
        user = self.user()
        owner = asked.get("organization") or user
        if user is None:
            return self.refuse(401, "Invalid username or password.")
        if owner != user:
            return self.refuse(403, "You don't have the rights to create a model here")
        repo_id = f"{owner}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            return self.json({**answer, "error": "You already created this model repo"}, 409)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.repo(repo_id, {".gitattributes": b"*.safetensors lfs\n"}, private=private)
        return self.json(answer)

    def facts(self, repo_id: str, repo: Repo, sha: str) -> dict[str, Any]:
        files = repo.commits[sha]
        card: dict[str, Any] = {}
        if files.get("README.md", b"").startswith(b"---"):
            card = yaml.safe_load(files["README.md"].decode().split("---")[1])
        base, relation = card.get("base_model"), card.get("base_model_relation")
        library = card.get("library_name")
        tags = [
            *([library] if library else []),
            *card.get("tags", []),
            *([f"base_model:{base}"] if base else []),
            *([f"base_model:{relation}:{base}"] if base and relation else []),
            *(f"dataset:{name}" for name in card.get("datasets", [])),
            *([f"license:{card['license']}"] if "license" in card else []),
        ]
        try:
            config = dict(json.loads(files.get("adapter_config.json", b"{}")))
        except ValueError:
            config = {}
        facts = {
            "id": repo_id,
            "modelId": repo_id,
            "author": repo_id.partition("/")[0],
            "sha": sha,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "downloads": repo.downloads,
            "likes": 0,
            "tags": list(dict.fromkeys(tags)),
            "siblings": [{"rfilename": name} for name in sorted(files)],
            "cardData": card,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "config": {"adapters": {"model_name": config.get("model_name")}},
        }
        if library:
            facts["library_name"] = library
        if "pipeline_tag" in card:
            facts["pipeline_tag"] = card["pipeline_tag"]
        return facts

    def on_info(self, repo: str, rev: str = "main") -> None:
        found = self.repo(repo)
        sha = found and self.revision(found, rev)
        if not found or not sha:
            return
        facts = self.facts(repo, found, sha)
        if "blobs" in self.query:
            facts["siblings"] = [
                {"rfilename": name, "size": len(content), "blobId": git(content)}
                | ({"lfs": {"size": len(content), "sha256": sha256(content), "pointerSize": 130}}
                   if name.endswith(LFS) else {})
                for name, content in sorted(found.commits[sha].items())
            ]  # fmt: skip
        self.json(facts)

    def on_search(self) -> None:
        def one(key: str, default: str = "") -> str:
            return self.query.get(key, [default])[0]

        hits = []
        for repo_id, repo in self.hub.repos.items():
            facts = self.facts(repo_id, repo, repo.branches["main"])
            mine = self.user() == repo_id.partition("/")[0]
            task = one("pipeline_tag")
            if (
                (mine or not repo.private)
                and {*self.query.get("filter", [])} <= {*facts["tags"]}
                and task in ("", facts.get("pipeline_tag"))
                and one("search") in repo_id
                and one("author") in ("", facts["author"])
            ):
                hits.append(facts)
        hits.sort(key=lambda facts: -facts["downloads"])
        start = int(one("cursor", "0"))
        more = {}
        if start + PAGE < len(hits):
            query = "&".join(
                f"{key}={quote(value)}"
                for key, values in self.query.items()
                for value in values
                if key != "cursor"
            )
            more["Link"] = f'<{self.hub.url}/api/models?{query}&cursor={start + PAGE}>; rel="next"'
        self.json(hits[start : start + PAGE], **more)

    def on_branch(self, repo: str, rev: str) -> None:
        found = self.repo(repo, write=True)
        if not found:
            return None
        if rev in found.branches:
            return self.refuse(409, "Reference already exists")
        found.branches[rev] = found.branches["main"]
        return self.json({})

    # --- files out ---

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "type": "file", "path": name, "size": len(content), "oid": git(content),
        }  # fmt: skip
        if name.endswith(LFS):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
        return entry

    def on_tree(self, repo: str, rev: str, file: str = "") -> None:
        found = self.repo(repo)
        sha = found and self.revision(found, rev)
        if not found or not sha:
            return None
        files = {k: v for k, v in found.commits[sha].items() if k.startswith(file)}
        if file and not files:
            return self.refuse(404, f"{file} does not exist", "EntryNotFound")
        return self.json([self.entry(name, content) for name, content in sorted(files.items())])

    def on_paths(self, repo: str, rev: str) -> None:
        found = self.repo(repo)
        sha = found and self.revision(found, rev)
        if not found or not sha:
            return
        paths = parse_qs(self.body.decode())["paths"]
        files = found.commits[sha]
        self.json([self.entry(name, files[name]) for name in paths if name in files])

    def on_resolve(self, repo: str, rev: str, file: str) -> None:
        found = self.repo(repo)
        sha = found and self.revision(found, rev)
        if not found or not sha:
            return None
        owner = self.user() == repo.partition("/")[0]
        if found.gated and not owner:
            status = 403 if self.user() else 401
            return self.refuse(status, "Access to this model is restricted", "GatedRepo")
        content = found.commits[sha].get(file)
        if content is None:
            return self.refuse(404, "Entry not found", "EntryNotFound", X_Repo_Commit=sha)
        if not file.endswith(LFS):
            return self.content(content, ETag=f'"{git(content)}"', X_Repo_Commit=sha)
        oid = sha256(content)
        self.hub.objects[oid] = content
        return self.send(
            302,
            Location=f"{self.hub.cdn}/objects/{oid}",
            X_Repo_Commit=sha,
            X_Linked_Etag=f'"{oid}"',
            X_Linked_Size=str(len(content)),
        )

    # --- files in ---

    def on_preupload(self, repo: str, rev: str) -> None:
        found = self.repo(repo, write="create_pr" not in self.query)
        sha = found and self.revision(found, rev)
        if not found or not sha:
            return
        there = found.commits[sha]
        answers = []
        for file in json.loads(self.body)["files"]:
            mode = "lfs" if file["path"].endswith(LFS) else "regular"
            old = there.get(file["path"])
            oid = None if old is None else sha256(old) if mode == "lfs" else git(old)
            answers.append(
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        self.json({"files": answers})

    def on_batch(self, repo: str) -> None:
        if not self.repo(repo):
            return
        answers = []
        for thing in json.loads(self.body)["objects"]:
            answer = {"oid": thing["oid"], "size": thing["size"]}
            if thing["oid"] not in self.hub.objects:
                answer["actions"] = {
                    "upload": {"href": f"{self.hub.cdn}/objects/{thing['oid']}"},
                    "verify": {"href": f"{self.hub.url}/{repo}/lfs-verify"},
                }
            answers.append(answer)
        self.json({"transfer": "basic", "objects": answers})

    def on_verify(self, repo: str) -> None:
        thing = json.loads(self.body)
        if len(self.hub.objects.get(thing["oid"], b"")) != thing["size"]:
            return self.refuse(404, "the object did not arrive")
        return self.json({})

    def on_commit(self, repo: str, rev: str) -> None:
        request = "create_pr" in self.query
        found = self.repo(repo, write=not request)
        sha = found and self.revision(found, rev)
        if not found or not sha:
            return None
        files = dict(found.commits[sha])
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self.refuse(400, "the LFS object is missing")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        number = sum(name.startswith("refs/pr/") for name in found.branches) + 1
        branch = f"refs/pr/{number}" if request else rev
        made = found.commit(files, branch, message)
        answer = {"commitUrl": f"{self.hub.url}/{repo}/commit/{made}", "commitOid": made,
                  "success": True}  # fmt: skip
        if request:
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{number}"
        return self.json(answer)
