BEGIN TRANSACTION;
CREATE TABLE answers (
                    key TEXT PRIMARY KEY, at REAL NOT NULL, model TEXT NOT NULL, data TEXT NOT NULL
                ) WITHOUT ROWID
                ;
INSERT INTO "answers" VALUES('485055e03cc2f2c7d353bf2c74a3fa6b',1.79604345805229330063e+09,'echo','{"text": "Repeat a", "reasoning": "", "finish_reason": "length", "error": null, "code": "", "prompt_tokens": 15, "cached_tokens": 5, "output_tokens": 4, "ttft_s": 0.002903038010117598, "total_s": 0.004334101002314128, "request_id": "row_9d054cf8b709ca63", "logprobs": null}');
INSERT INTO "answers" VALUES('ba4c7bf9bf191c7b692dfc5de698e8a9',1.79604345805238127704e+09,'echo','{"text": "Repeat b", "reasoning": "", "finish_reason": "length", "error": null, "code": "", "prompt_tokens": 15, "cached_tokens": 5, "output_tokens": 4, "ttft_s": 0.002510161997633986, "total_s": 0.003808466994087212, "request_id": "row_c70bad43619ed361", "logprobs": null}');
COMMIT;
PRAGMA application_id = 1280137282;
PRAGMA user_version = 1;
